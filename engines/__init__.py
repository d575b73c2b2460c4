"""The engines, which sample responses with the policy's weights. engine.py has their base class."""

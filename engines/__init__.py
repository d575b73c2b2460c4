"""Engines: each samples responses with the policy's weights. engine.py has the contract."""

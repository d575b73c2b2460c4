"""Layers: what a model computes on packs, faster or with less memory than in transformers."""

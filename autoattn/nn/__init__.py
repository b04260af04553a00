"""Attention as modules, for models."""

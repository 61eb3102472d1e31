"""Deterministic mode: the logits of a token depend on its own sequence alone, to the last bit.

Every sum is taken in one order, whatever else is computed beside it: see `docs/architecture.md`.
"""

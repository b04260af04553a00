"""Expressions that change scores or hide pairs: their language, derivatives, and how a Python function becomes one."""

"""Damaged inputs: how they are made (`mutations`, `cases`), tried (`children`) and judged."""

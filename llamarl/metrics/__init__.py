"""Spans, sums over them, and where numbers are written."""

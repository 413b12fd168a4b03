"""The measurements of a run: what it shows of itself, and what it writes."""

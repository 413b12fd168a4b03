"""Prompts and demonstrations: files, rows, and their order."""

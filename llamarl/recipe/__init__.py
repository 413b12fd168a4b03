"""A recipe: its config composed and checked, its inputs read, its starting point found."""

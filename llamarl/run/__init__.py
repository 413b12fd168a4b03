"""Who is started, watched, mended and scaled, and how the objects of a run are wired."""

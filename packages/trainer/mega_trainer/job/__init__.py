"""What keeps a run alive, ends it in good time, and tells of it; nothing here changes what a step computes."""

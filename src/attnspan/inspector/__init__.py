"""Pictures of masks, layouts and plans. Reads data, never runs attention."""

"""The host: its cores and its memory."""

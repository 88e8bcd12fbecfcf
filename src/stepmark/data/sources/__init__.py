"""Files, folders and datasets as texts or rows of chat data."""

"""Files and folders: where state lives, JSON lines and their records, files written whole."""

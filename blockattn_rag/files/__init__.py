"""Files and folders: where state lives, and lines of JSON."""

"""The demo as frozen data: an encyclopedia, questions about it, and the model that reads it."""

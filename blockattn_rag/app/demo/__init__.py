"""The demo: articles and questions, the bundled test model with its encyclopedia, a page."""

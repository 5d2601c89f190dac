"""Demo: articles and questions, a web page, and data for the bundled test model."""

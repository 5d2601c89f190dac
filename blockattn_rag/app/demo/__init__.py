"""The demo: articles and questions, a web page, and the data of the bundled test model."""

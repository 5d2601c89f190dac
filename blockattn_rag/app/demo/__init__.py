"""The demo: articles and questions, the encyclopedia of the bundled test model, and a web page."""

"""Generation of the bundled model and the demo's data; see README.md in this folder."""

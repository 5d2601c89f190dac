"""How the bundled model and the demo's data were made; see README.md in this folder."""

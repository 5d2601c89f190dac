"""Code that generated the data and models in the package; not included in the wheel."""

"""Calibration: settings of block mode are chosen for a model and a collection, and certified."""

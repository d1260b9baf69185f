"""The style, the scripts and the charting libraries that pages hold inside; LICENSES.txt says whose they are."""

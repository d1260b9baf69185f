"""Numbers of real chips and networks, each with its source, and the coefficients of the area model."""

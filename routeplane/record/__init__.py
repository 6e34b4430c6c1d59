"""What a route means: geometry, rows, spans, records, calls, checksums, the Arrow format.

Import these names from ``routeplane`` itself. Knows no other stage. Base dependencies only (numpy, pyarrow, xxhash);
``record.kernels`` uses numba where it is installed.
"""

"""Pages and charts of the benchmark records."""

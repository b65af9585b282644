"""What writes the chart's generated files; nothing of the server imports it."""

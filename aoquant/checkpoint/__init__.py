"""What is on disk: weight files, their headers and names, read without torch."""

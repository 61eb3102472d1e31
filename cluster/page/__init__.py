"""A live page of the pool for a browser, and the numbers behind it."""

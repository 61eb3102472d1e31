"""How many replicas a pool needs: decided from what its routers know, applied by Ray Serve."""

"""Many workers as one service: router, replicas, membership, client, command line."""

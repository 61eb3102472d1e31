"""`make demo`: a pool that streams, loses a replica, heals, and goes without leaving anything behind."""

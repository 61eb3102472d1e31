"""The process clients call: it knows the replicas and gives each request to one of them."""

"""A pool of replicas: equal backends in other processes, which share a run's requests. Knows nothing about Ray."""

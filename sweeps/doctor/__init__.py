"""`python -m sweeps.doctor`: check whether a cluster, its services and its folders are ready for a sweep."""

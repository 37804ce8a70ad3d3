"""`python -m sweeps.doctor`: whether a cluster, its services and its folders are ready for a sweep."""

"""What a person may see of a running fleet: its instances, its figures, requests' journeys."""

"""Looking at and scoring what the ensemble and the monolith produce."""

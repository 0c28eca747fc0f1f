"""What a person sees of a run. Every view only reads the run directory; none of them imports torch."""

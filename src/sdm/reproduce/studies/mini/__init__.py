"""`sdm reproduce mini`: every experiment of the paper at small scale, with seeds and intervals."""

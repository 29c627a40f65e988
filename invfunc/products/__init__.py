"""Products of curvature matrices with vectors, and what is made of them: operators and estimates."""

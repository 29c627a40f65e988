"""The statistics: public transforms with their formulas, of the gradient, of columns, and of Kronecker factors."""

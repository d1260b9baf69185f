"""Plans and searches derived again by plain, independent code, and compared number by number."""

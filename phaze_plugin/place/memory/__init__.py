"""What each device holds, the placement that needs least, and remedies where nothing fits."""

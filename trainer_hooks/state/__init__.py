"""What is copied of a model, its optimizer and all else that training needs to go on."""

"""What is in the data: near-empty rows, duplicates, rows that training and evaluation share; and limits on them."""

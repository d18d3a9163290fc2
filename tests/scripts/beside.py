HERE = "beside the script"

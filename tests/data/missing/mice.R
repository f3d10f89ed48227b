# The numbers that tests/test_missing.py compares with: R's mice on holes.csv, pooled by Rubin's rules.
#   Rscript tests/data/missing/mice.R
library(mice)
folder <- "tests/data/missing"
rows <- read.csv(file.path(folder, "holes.csv"), na.strings = "", stringsAsFactors = TRUE)
rows$y <- factor(rows$y)
completed <- mice(rows, m = 200, maxit = 10, seed = 1, printFlag = FALSE)
pooled <- pool(with(completed, glm(y ~ x1 + x2 + g, family = binomial)))$pooled
numbers <- data.frame(
  term = pooled$term, estimate = pooled$estimate, sd = sqrt(pooled$t), missing_information = pooled$lambda
)
write.csv(numbers, file.path(folder, "mice.csv"), row.names = FALSE)
cat(R.version.string, "mice", as.character(packageVersion("mice")), "\n")

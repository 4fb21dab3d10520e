// step_times compares measured step times: their middle, and whether one way of training is faster for certain.
#pragma once

#include <vector>

namespace torchext::core {

// Of an even number of values the mean of the two in the middle. std::invalid_argument without any.
double median(std::vector<double> values);

double mean(const std::vector<double>& values);

// Whether `candidate`'s mean is below `reference`'s by more than `standard_errors` of the difference (Welch 1947: the
// two may vary differently). Less than two of either say nothing: false.
bool clearlyFaster(const std::vector<double>& candidate, const std::vector<double>& reference, double standard_errors);

}  // namespace torchext::core

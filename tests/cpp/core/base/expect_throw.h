// EXPECT_THROW that also looks into the message: an error without its numbers is half an error.
#pragma once

#include <gtest/gtest.h>

#include <string>

// NOLINTNEXTLINE(cppcoreguidelines-macro-usage)
#define EXPECT_THROW_MESSAGE(statement, type, part)                                         \
  EXPECT_THROW(                                                                             \
      try { statement; } catch (const type& error) {                                        \
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what(); \
        throw;                                                                              \
      },                                                                                    \
      type)

// Completes the word at the end of a condition: a datalist completes a whole input, so each option has all that is before the word.
"use strict";

const MOST_OPTIONS = 30;

function complete() {
  const input = document.querySelector("input[name=q]"), options = document.getElementById("q-words");
  const words = JSON.parse(document.getElementById("words").textContent);
  const update = () => {
    const [, before, word] = input.value.match(/^(.*?)("[^"]*|[\w./]*)$/su);
    const quotes = before.replace(/''/g, "").split("'").length - 1;
    const found = quotes % 2 ? [] : words.filter((each) => each !== word && each.toLowerCase().startsWith(word.toLowerCase()));
    options.replaceChildren(...found.slice(0, MOST_OPTIONS).map((each) => new Option("", before + each)));
  };
  input.addEventListener("input", update);
  update();
}

document.addEventListener("DOMContentLoaded", complete);

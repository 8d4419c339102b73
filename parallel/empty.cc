// placeholder until parallel/ lands
